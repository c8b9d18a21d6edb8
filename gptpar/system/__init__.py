"""What is asked of the machine and the operating system: memory, signals, native code, life signs."""
