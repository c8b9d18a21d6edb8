"""Checks of a resolved configuration, one file a topic: each yields a sentence for every problem it finds."""
