"""The searches for unwritten descriptors and overwritten operands themselves."""

from offline.descriptors import unwritten
from offline.operands import overwritten

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


LOOP = """
        /*0000*/                   LDSM.16.M88.4 R132, [R15+0x22000] ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32 R24, R132, gdesc[UR16], RZ, !UPT ;
        /*0020*/                   F2FP.F16.F32.PACK_AB R120, R25, R24 ;
        /*0030*/                   HGMMA.64x64x16.F32 R88, R120, gdesc[UR16].tnspB, R88 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_operands_with_registers_of_their_own_are_fine():
    assert overwritten(LOOP) == []


def test_an_operand_that_the_loop_overwrites_is_found():
    shared = LOOP.replace("F2FP.F16.F32.PACK_AB R120", "F2FP.F16.F32.PACK_AB R134")
    assert overwritten(shared) == ["HGMMA.64x64x16.F32 R24, R132, gdesc[UR16], RZ, !UPT"]


def test_an_operand_that_each_turn_loads_anew_is_fine():
    load = LOOP.splitlines()[1]
    anew = LOOP.replace(load, "").replace(".L_x_1:\n", f".L_x_1:\n{load}\n")
    assert overwritten(anew.replace("PACK_AB R120", "PACK_AB R132")) == []
