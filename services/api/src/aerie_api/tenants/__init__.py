"""Who uses the house: tenants, their keys, their limits, and a record of what each did."""
