"""What Spillway knows of other libraries."""
