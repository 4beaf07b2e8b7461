"""What the scripts share: command line, results, models, sides of benchmarks, peers, prompts, pictures."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tests" / "testbed"
BENCHMARKS = ROOT / "docs" / "benchmarks"
sys.path.insert(0, str(ROOT))  # the scripts run from a checkout, installed or not
