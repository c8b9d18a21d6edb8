"""The sections of the configuration, one file each, with their flags."""
