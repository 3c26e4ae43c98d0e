"""Programs that people train, and what they cost under the proxy against plain torch."""
