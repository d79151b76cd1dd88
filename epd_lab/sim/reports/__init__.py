"""Files about one run: its page, its timeline, its sequence of messages."""
