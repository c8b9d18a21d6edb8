"""Faults injected into real runs, in a file for each subject: kills, full disks, damaged files. Do the runs survive?"""
