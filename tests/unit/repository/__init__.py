"""Tests of the repository itself: imports, sizes of files, documents, examples, mutations."""
