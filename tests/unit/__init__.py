"""Tests of single modules, in a folder for each package."""
