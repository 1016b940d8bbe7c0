"""Commands that work on files without a daemon."""
