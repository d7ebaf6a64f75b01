"""Where units run: in a child process of this machine, and room for more."""
