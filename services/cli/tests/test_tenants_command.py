"""`aerie tenants` against a real API: limits are set, kept, taken away and shown beside what is used."""

import json


def test_a_tenant_is_made_limited_and_shown(aerie):
    made = aerie.json("tenants", "create", "red", "--store-bytes", "5000", "--gpu-hours", "1.5")
    assert (made["limits"]["store_bytes"], made["limits"]["gpu_hours"]) == (5000, 1.5)

    changed = aerie.json("tenants", "limit", "red", "--store-bytes", "none", "--max-running-jobs", "2")

    assert (changed["limits"]["store_bytes"], changed["limits"]["max_running_jobs"]) == (None, 2)
    assert changed["limits"]["gpu_hours"] == 1.5, "what is not named stays"
    aerie("tenants", "limit", "red", "--store-bytes", "7000")
    (line,) = [words for row in aerie("tenants", "list").stdout.splitlines() if "red" in (words := row.split())]
    assert line == ["red", "1", "0", "of", "2", "0", "0.0", "of", "1.5", "0", "of", "7000"]


def test_what_is_no_limit_or_no_tenant_is_refused_with_status_2(aerie):
    for words in (("red", "--store-bytes", "much"), ("red", "--store-bytes", "-1"), ("../keys", "--gpu-hours", "1")):
        refused = aerie("tenants", "limit", *words, "--json")
        assert (refused.exit_code, json.loads(refused.stdout)["code"]) == (2, "request.invalid")
