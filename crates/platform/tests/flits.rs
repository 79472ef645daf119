//! Efficiencies of flits follow from what their bytes are, and are those that consortia publish and platforms have.

use polder_platform::Platform;

/// The parts of a flit: what each is, its bytes, and whether it carries packets.
struct Flit {
    parts: &'static [(&'static str, u32, bool)],
}

impl Flit {
    fn bytes(&self) -> u32 {
        self.parts.iter().map(|(_, bytes, _)| bytes).sum()
    }

    fn carried(&self) -> f64 {
        let carried: u32 =
            self.parts.iter().filter(|(.., carries)| *carries).map(|(_, bytes, _)| bytes).sum();
        f64::from(carried) / f64::from(self.bytes())
    }
}

/// PCI Express 6.0 in flit mode.
const PCIE_6: Flit = Flit {
    parts: &[
        ("transaction layer packets", 236, true),
        ("data link layer payload", 6, false),
        ("CRC", 8, false),
        ("FEC", 6, false),
    ],
};

/// CXL 1.1 and 2.0: four slots.
const CXL_68: Flit = Flit { parts: &[("protocol id", 2, false), ("slots", 4 * 16, true), ("CRC", 2, false)] };

/// CXL 3.x: a slot of 14 bytes beside the header, and 14 of 16.
const CXL_256: Flit = Flit {
    parts: &[
        ("header", 2, false),
        ("first slot", 14, true),
        ("slots", 14 * 16, true),
        ("credits", 2, false),
        ("CRC", 8, false),
        ("FEC", 6, false),
    ],
};

/// The data link layer of UALink 200G: five segments of transaction layer flits.
const UALINK_DATA_LINK: Flit = Flit {
    parts: &[
        ("header", 3, false),
        ("segment headers", 5, false),
        ("transaction layer flits", 628, true),
        ("CRC", 4, false),
    ],
};

/// Its transaction layer, for writes of 256 bytes in both directions: halves of a flit have 32 bytes. That of control has two requests, two
/// responses to the other direction's, and two credits; eight of data follow for each request. The bytes of a compressed request (8), a
/// response (4) and a credit (4) are assumed.
const UALINK_TRANSACTION: Flit = Flit {
    parts: &[
        ("requests", 2 * 8, false),
        ("responses", 2 * 4, false),
        ("credits", 2 * 4, false),
        ("data", 2 * 8 * 32, true),
    ],
};

fn off(computed: f64, published: f64) -> f64 {
    (computed / published - 1.0).abs()
}

#[test]
fn layouts_have_the_bytes_of_their_flits() {
    for (flit, bytes) in [(PCIE_6, 256), (CXL_68, 68), (CXL_256, 256), (UALINK_DATA_LINK, 640)] {
        assert_eq!(flit.bytes(), bytes, "{:?}", flit.parts);
    }
    // Control is half a flit of the transaction layer, 64 bytes.
    assert_eq!(UALINK_TRANSACTION.bytes() % 64, 32);
}

#[test]
fn efficiencies_are_within_one_per_cent_of_published_ones() {
    let ualink = UALINK_DATA_LINK.carried() * UALINK_TRANSACTION.carried();
    for (name, computed, published) in [
        ("UALink, 93% (the consortium)", ualink, 0.93),
        ("PCIe 6.0, 92.2% (236 of 256 bytes)", PCIE_6.carried(), 0.922),
        ("CXL 2.0, 94.1% (64 of 68 bytes)", CXL_68.carried(), 0.941),
        ("CXL 3.x, 93.75% (15 slots of 16 bytes in 256)", CXL_256.carried(), 0.9375),
    ] {
        assert!(off(computed, published) < 0.01, "{name}: {computed:.4} from the layout");
    }
}

#[test]
fn platforms_have_the_efficiencies_of_their_flits() {
    let [ualink, switched, memory] =
        ["ualink-1024", "nvl72-cxl", "memserver"].map(|name| Platform::load(name).unwrap());
    let ualink = ualink.rack["ualink"].fabric.as_ref().unwrap().link.flit;
    let switched = switched.between.unwrap().link.flit;
    let memory = memory.tier("cxl").unwrap().port.as_ref().unwrap().link.flit;
    let of_ualink = UALINK_DATA_LINK.carried() * UALINK_TRANSACTION.carried();
    for (name, flit, bytes, computed) in [
        ("ualink-1024", ualink, UALINK_DATA_LINK.bytes(), of_ualink),
        ("nvl72-cxl", switched, CXL_256.bytes(), CXL_256.carried()),
        ("memserver", memory, CXL_68.bytes(), CXL_68.carried()),
    ] {
        assert_eq!(flit.bytes.value(), f64::from(bytes), "{name}");
        let part = flit.efficiency();
        assert!(off(computed, part) < 0.01, "{name}: {part:.4}, and {computed:.4} from the layout");
    }
}
