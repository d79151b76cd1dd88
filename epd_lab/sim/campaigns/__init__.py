"""Many runs and what comes of them: searches, hunts for mutants, measurements."""
