"""The relational store: SQLite with nothing to set up, PostgreSQL and MariaDB by URL."""
