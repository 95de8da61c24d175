"""What differs between Linux, macOS and Windows, a file for each need. No module of it imports torch, and none fails to
import on any system: what a system lacks is left undone, or said (`limits.missing_protection`)."""
