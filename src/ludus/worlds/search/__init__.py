"""The search world: questions of one to three hops over real facts, answered with a search tool."""
