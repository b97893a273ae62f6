"""What stands between a launcher and a script or program on one rank: tagged output, log files, one traceback."""
