"""Code that differs between Linux, macOS and Windows, one file per subject.

No module imports torch, and each can be imported on every system. Features that a system lacks do nothing, or are
reported (`limits.missing_protection`).
"""
