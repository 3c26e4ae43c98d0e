"""Jobs of several ranks: a gang for the engine, a session per rank for the agent."""
