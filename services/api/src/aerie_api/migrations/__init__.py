"""How the database's schema came to be, revision by revision. Expand first, contract a release later."""
