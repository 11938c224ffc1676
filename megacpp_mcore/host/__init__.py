"""The host that a process runs on: its free memory, its nvcc, and processes that end with another.

Imports nothing else of the package.
"""
