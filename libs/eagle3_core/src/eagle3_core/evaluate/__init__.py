"""What a drafter is worth: real drafting and verifying, the report, the gate."""
