"""Second, small implementations of our interfaces, for tests: a client, a zygote with workers."""
