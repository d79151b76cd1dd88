"""What of public schemas and their instances is accepted: python -m tests.public_schemas [DIR …]

DIR: of files in MaskBench's form, such as its own `data`; else the sample.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.public_schemas.judge import DATA, paths, share

files = paths(map(Path, sys.argv[1:] or [DATA]))
for closes in (False, True):
    found, reasons, wrong = share(files, closes=closes)
    print(f"{'closed' if closes else 'letter'}: {found}")
    for reason, count in reasons.most_common(20):
        print(f"  {count:6} {reason[:120]}")
    if not closes:
        print("  invalid, and accepted:", [one for one in wrong if "(invalid)" in one])
        print(
            "  valid, and refused by its grammar:", [one for one in wrong if "(valid)" in one][:40]
        )
