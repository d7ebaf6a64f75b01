"""Jobs: posted, read, cancelled, retried."""
