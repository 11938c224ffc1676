"""A trained model at work: loading it on one device, generating text, judging it on data."""
