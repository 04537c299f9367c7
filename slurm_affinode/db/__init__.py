"""The database: SQLite without any setup, or PostgreSQL or MariaDB by URL."""
