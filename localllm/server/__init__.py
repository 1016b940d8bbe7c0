"""Wire formats: pure translations between HTTP bodies and the native request."""
