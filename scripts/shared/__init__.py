"""What the scripts share: the command line, timing, results in tables and files, bars, plots, models and texts."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tests" / "testbed"
sys.path.insert(0, str(ROOT))  # the scripts run from a checkout, installed or not
