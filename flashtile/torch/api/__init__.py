"""What users call: each function a door, which checks nothing and hands on."""
