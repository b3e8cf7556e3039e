"""What people and programs read of a run while it goes on."""
