"""What every part needs and that needs none of ours: errors, files, processes, devices."""
