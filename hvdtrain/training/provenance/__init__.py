"""What a job ran with, so that it can be cited and repeated: code, packages, hardware, launcher."""
