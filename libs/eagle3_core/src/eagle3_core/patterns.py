"""What names and addresses in a document may look like: each as a regular expression, and in words.

The expression goes into schemas, for programs. A person whose name was refused reads the words (`faults.sentence`).
"""

from __future__ import annotations

JOB_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
KEY_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ARGUMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
TENANT_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
SERVER_ADDRESS = r"^https?://[^\s?#@]+$"
BLAKE3 = r"^[0-9a-f]{64}$"

IN_WORDS = {
    JOB_NAME: "1 to 63 small letters, digits, '.', '_' or '-', with a letter or digit at either end",
    KEY_NAME: "1 to 63 small letters, digits, '.', '_' or '-', with a letter or digit at the beginning",
    ARGUMENT_NAME: "1 to 64 letters, digits or '_', with no digit at the beginning",
    TENANT_NAME: "1 to 63 small letters, digits or '-', with a letter or digit at either end",
    SERVER_ADDRESS: "an http:// or https:// address without user name, query or fragment",
}
