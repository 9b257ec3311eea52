"""The search for unwritten descriptors itself."""

from offline.descriptors import unwritten

HEAD = """
        /*0000*/                   UMOV UR4, 0x1 ;
        /*0010*/                   UMOV UR5, 0x2 ;
        /*0020*/              @!P1 BRA `(.L_x_1) ;
        /*0030*/                   UIADD3.64 UR6, UR4, 0x80, URZ ;
"""
BEHIND = """
        /*0050*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4].tnspB, R24 ;
        /*0060*/                   EXIT ;
"""


def test_what_every_path_writes_is_fine():
    other = ".L_x_1:\n        /*0048*/  UIADD3.64 UR6, UR4, 0x40, URZ ;\n.L_x_2:\n"
    sides = "        /*0040*/  BRA `(.L_x_2) ;\n" + other
    assert unwritten(HEAD + sides + BEHIND) == []


def test_what_one_path_writes_is_found():
    assert unwritten(HEAD + ".L_x_1:\n" + BEHIND) == [
        "HGMMA.64x64x16.F32 R24, gdesc[UR4].tnspB, R24"
    ]


def test_loops_that_write_before_they_read_are_fine():
    loop = ".L_x_3:\n        /*0040*/  UIADD3.64 UR6, UR4, 0x80, URZ ;\n"
    back = BEHIND.replace("EXIT ;", "@P0 BRA `(.L_x_3) ;\n        /*0070*/ EXIT ;")
    assert unwritten(HEAD + ".L_x_1:\n" + loop + back) == []
