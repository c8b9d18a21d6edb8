"""Faults injected into real runs: kills, signals, full disks, damaged and malicious files. Does each run survive?"""
