"""The arguments of `epd bench`, and what they become."""
