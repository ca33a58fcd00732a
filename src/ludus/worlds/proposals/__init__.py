"""The proposals world: a policy that proposes programs as tasks, and solves them."""
