"""From records to what a person reads; the only place that rounds or converts units."""
