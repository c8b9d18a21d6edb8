"""Tests of commands and errors as a user sees them, each in processes of its own."""
