"""The machine and the operating system: memory, cores, signals, processes, files, native code."""
