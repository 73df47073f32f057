"""A script that never tells verify about its steps."""

print("trained, trust me")
