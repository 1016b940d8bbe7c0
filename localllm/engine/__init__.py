"""Scheduling over a paged KV store: sequences, block pool, scheduler and the one engine thread."""
