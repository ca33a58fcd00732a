"""The games world: tic-tac-toe and Kuhn poker between two players that are both the policy, or one and an opponent."""
