"""What tests stand on: real processes, a private Slurm, an S3 server, a browser, typed documents."""
