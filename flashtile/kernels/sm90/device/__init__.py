"""Device code that both of Hopper's passes share."""
