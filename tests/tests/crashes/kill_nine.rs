//! Killed at random moments under a stamped load, a volume keeps its word: with its journal nothing
//! accepted is lost; without it the volume is exactly a cut; and with `flush = stored` no completed
//! flush is lost even then.
//!
//! `SAWMILL_KILLS` (200 by default) is the number of kills over all tests here; the seed is
//! printed.

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::nbd::Client;
use sawmill_tests::on_each_store;
use sawmill_tests::server::{Server, ServerBuilder};
use sawmill_tests::stamp::{
    Log, Verdict, Violation, check_cut, check_flushed_kept, check_nothing_accepted_lost,
};
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    accepted_writes_survive_kill_nine,
    a_lost_journal_leaves_exactly_a_cut,
    completed_flushes_survive_a_lost_journal_when_flush_is_stored,
);

const VOLUME_BYTES: u64 = 16 << 20;

type Check = fn(&Log, &[u8]) -> Result<Verdict, Violation>;

/// One kind of crash, again and again on one volume.
struct CrashCase {
    name: &'static str,
    flush: &'static str,
    lose_journal: bool,
    check: Check,
    /// Of the kills asked for, how many percent fall to this test against a folder, and against
    /// MinIO.
    share: (u64, u64),
}

fn accepted_writes_survive_kill_nine(store: &StoreUnderTest) {
    let check = check_nothing_accepted_lost;
    let name = "journal kept";
    CrashCase { name, flush: "logged", lose_journal: false, check, share: (30, 15) }.strike(store);
}

fn a_lost_journal_leaves_exactly_a_cut(store: &StoreUnderTest) {
    let name = "journal lost";
    CrashCase { name, flush: "logged", lose_journal: true, check: check_cut, share: (20, 10) }
        .strike(store);
}

fn completed_flushes_survive_a_lost_journal_when_flush_is_stored(store: &StoreUnderTest) {
    let check = check_flushed_kept;
    let name = "journal lost, flush = stored";
    CrashCase { name, flush: "stored", lose_journal: true, check, share: (15, 10) }.strike(store);
}

/// The proof that the judge has teeth: what a lost journal costs is seen as a loss.
#[test]
fn a_lost_journal_does_not_pass_for_a_kept_one() {
    let bed = TestBed::new(&sawmill_tests::store::folder());
    bed.create("disk", "16M", &[]);
    let server = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("kill_nine"), Mix::default());
    load.drive(&[server.connect()], 200, || server.kill());
    bed.lose_state();
    let server = bed.serve("disk").with(&["--accept-journal-loss"]).start();
    let image = server.connect().read_all().expect("readable");
    assert!(
        check_nothing_accepted_lost(&load.log, &image).is_err(),
        "200 lost writes were not missed"
    );
    assert!(check_cut(&load.log, &image).is_ok());
}

impl CrashCase {
    fn strike(&self, store: &StoreUnderTest) {
        let in_all =
            std::env::var("SAWMILL_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
        let share =
            if matches!(store, StoreUnderTest::Folder) { self.share.0 } else { self.share.1 };
        let kills: u64 = (in_all * share / 100).max(1);
        let bed = TestBed::new(store);
        bed.create("disk", "16M", &["--segment-bytes", "256K", "--flush", self.flush]);
        // A flush that goes to the store is slow: fewer of them, or nothing else happens.
        let flush_once_in = if self.flush == "stored" { 150 } else { 40 };
        let mix = Mix { flush_once_in, ..Mix::default() };
        let mut load = Load::new(VOLUME_BYTES, Dice::seeded("kill_nine"), mix);
        let mut sum = Verdict::default();
        for kill in 0..kills {
            if load.dice.one_in(5) {
                self.serve(&bed).die_while_starting(&mut load.dice);
            }
            let server = self.serve(&bed).start();
            let clients: Vec<Client> = (0..=load.dice.below(3)).map(|_| server.connect()).collect();
            self.check_content(kill, &mut load, &clients[0], &mut sum);
            self.die_under_load(&bed, server, &clients, &mut load);
        }
        let server = self.serve(&bed).start();
        self.check_content(kills, &mut load, &server.connect(), &mut sum);
        let _ = server.stop().ok();
        let _ = bed.sawmill(&["check", "disk"]).ok();
        let CrashCase { name, .. } = self;
        println!(
            "{kills} kills, {name}: {} writes kept, {} lost, {} demanded",
            sum.kept, sum.lost, sum.demanded
        );
        assert!(sum.kept > 0, "nothing was ever kept: this run proves nothing");
    }

    fn serve<'a>(&self, bed: &'a TestBed) -> ServerBuilder<'a> {
        let serve = bed.serve("disk").with(&["--journal-bytes", "16M"]);
        if self.lose_journal { serve.with(&["--accept-journal-loss"]) } else { serve }
    }

    fn check_content(&self, kill: u64, load: &mut Load, client: &Client, sum: &mut Verdict) {
        let image = client.read_all().expect("the whole volume can be read after a restart");
        match (self.check)(&load.log, &image) {
            Ok(verdict) => {
                sum.kept += verdict.kept;
                sum.lost += verdict.lost;
                sum.demanded += verdict.demanded;
            }
            Err(violation) => panic!("{}, after kill {kill}: {violation}", self.name),
        }
        load.log.rebase(&image);
    }

    fn die_under_load(&self, bed: &TestBed, server: Server, clients: &[Client], load: &mut Load) {
        let completions = 1 + load.dice.below(1500);
        let mut server = server;
        load.drive(clients, completions, || {
            assert!(server.is_running(), "the server died by itself:\n{}", server.stderr());
            server.kill();
        });
        if self.lose_journal {
            bed.lose_state();
        }
    }
}
