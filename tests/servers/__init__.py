"""Real servers for tests: PostgreSQL, Redis and S3, each found or fetched, started on loopback, killed and restarted."""
