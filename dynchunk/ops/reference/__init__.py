"""Plain torch implementations: any device, always right."""
