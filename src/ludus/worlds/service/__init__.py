"""The service world: customer service with a database, a policy and a simulated user."""
