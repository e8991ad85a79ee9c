"""What every room uses: errors, units, devices, files, threads."""
