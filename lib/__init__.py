"""The workbook's library: everything that a notebook calls.

`lib` reads, launches, measures, audits and deploys SGLang servers; the notebooks ask and explain; `params/` decides.
Rooms that only compute take text, numbers and records and give records back; rooms that touch the world are thin.
"""

__version__ = "0.1.0"
