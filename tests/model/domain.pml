/*
 * Micro-batches with collectives of several communicators inside, which all ranks of a job keep or all run again
 * (docs/collectives.md): each rank's thread, what takes its memory, the devices. together.pml has those of one
 * communicator, cut.pml the steps of arriving and granting, which are one here.
 *
 * One communicator, D, has all ranks: it numbers the ends of micro-batches, and the epoch of its word is the job's.
 * A try at a micro-batch belongs to the epoch of D in which it made its first call. Before a rank arrives at a number
 * of another communicator it raises that word's epoch to its try's, if it is older. While it waits it looks at D, too:
 * when D has moved on it raises the word's epoch to D's, and then looks whether its number had been granted. A question
 * that was taken back and is dropped moves D on, if nobody has yet, then its own word, in the step that ends its pause.
 *
 * The calls inside are of the communicators in turn; each rank makes those that it is in. A collective ends on all
 * devices when the last has begun it, which is what the taking of memory waits for. A device runs them in any order.
 *
 *   -DPAIR         two ranks, two communicators of both; else three ranks, {1, 2} and {0, 1}
 *   -DRING         three ranks, {1, 2}, {0, 1}, and {0, 2}
 *   -DGRID         four ranks, shards {1, 3} and {0, 2}, replicas {1, 2} and {0, 3}
 *   -DOF_ALL       calls inside are of D, too, after the others
 *   -DPRESENT      a rank raises the word's epoch to D's present one before it arrives, not to its try's
 *   -DCONTROL      as on the host: who takes the memory pauses the rank's words itself, and the rank goes on waiting
 *   -DDEATH        a rank may be killed at any instant
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_RAISE     a rank arrives in its try's epoch whatever the word's is
 *   -DSET          … sets the word's epoch to its try's, though it may be newer
 *   -DOLD_LOOK     … takes the word's epoch for an older one by what D's was before it looked at the word
 *   -DNO_LOOK      whoever waits looks at its word alone, not at D
 *   -DNO_STOP      what waits is dropped when D has moved on, and its word's epoch stays
 *   -DNO_RELOOK    … is dropped though it had been granted
 *   -DNO_BEGIN     a call belongs to the epoch in which it is asked about, whatever its micro-batch began in
 *   -DNO_BACK      a question that was taken back and is dropped leaves its word's epoch as it is
 *   -DNO_MOVE      … leaves D's as it is, and its word gets that
 *   -DBACK_FIRST   … moves its word on before D
 *   -DNO_TELL      a rank runs a micro-batch again without beginning an epoch
 *   -DNO_DEBT      a question is taken back though it is granted
 *   -DNO_FOLLOW    who takes the memory, as on the host, ends its pauses with the others' words in the old epoch
 *   -DNO_AGAIN     what was called between two micro-batches is not asked for again when an epoch begins
 */
#ifdef PAIR
#define RANKS 2
#define D 2
#define MEMBERS(c) 3
#else
#ifdef RING
#define RANKS 3
#define D 3
#define MEMBERS(c) (c == 0 -> 6 : (c == 1 -> 3 : (c == 2 -> 5 : 7)))
#else
#ifdef GRID
#define RANKS 4
#define D 4
#define MEMBERS(c) (c == 0 -> 10 : (c == 1 -> 5 : (c == 2 -> 6 : (c == 3 -> 9 : 15))))
#else
#define RANKS 3
#define D 2
#define MEMBERS(c) (c == 0 -> 6 : (c == 1 -> 3 : 7))
#endif
#endif
#endif
#define COMMS (D + 1)
#ifndef BATCHES
#define BATCHES 1
#endif
#ifndef INSIDE
#define INSIDE D  /* collectives in a micro-batch */
#endif
#ifndef BETWEEN
#define BETWEEN (D - 1)  /* the communicator of the one before it */
#endif
#ifndef TAKEN
#define TAKEN 1  /* ranks whose memory is asked for */
#endif
#ifndef TIMES
#define TIMES 1  /* each of them */
#endif
#ifndef SHORT
#define SHORT 0  /* ranks that may find no memory, or whose training code may fail */
#endif
#ifdef OF_ALL
#define IN_TURN COMMS
#else
#define IN_TURN D
#endif
#define CALLS (INSIDE + 2)  /* one before the micro-batch, those inside, its end */
#define END (INSIDE + 1)
#define OF(item) (item == 0 -> BETWEEN : (item == END -> D : (item - 1) % IN_TURN))
#define IS_IN(r, c) ((MEMBERS(c) >> r) & 1)
#define AT(r, c) ((r) * COMMS + (c))
#define IS_OPEN 0
#define CLOSING 1
#define CLOSED 2

/* The words. */
byte epoch[COMMS], granted[COMMS], pausing[COMMS];
/* What each rank has arrived at; its gate. */
byte arrived[RANKS * COMMS], arrived_in[RANKS * COMMS];
byte gate[RANKS];
bit inside[RANKS];
/* And its micro-batch: there is one; its memory has gone; the others know, or will. */
bit begun[RANKS], lost[RANKS], told[RANKS];
byte item[RANKS];         /* the call whose turn it is */
bit short_of[RANKS];      /* it has found no memory, and says so */
#ifdef CONTROL
byte launched[RANKS * COMMS];
#endif
bit dead;
/* The ranks that have made the number granted last, until all have: so long it runs on their devices. What the first of
 * them made, from 1, and the epoch that its micro-batch began in. */
byte made[COMMS], work[COMMS], work_of[COMMS];

#define RUNS(r, c) (((made[c] >> r) & 1) && (work[c] - 1) % CALLS != END)

/* Whoever finds that all have arrived moves the word on. */
inline try_to_grant(c) {
  ok = 1;
  i = 0;
  do
  :: i < RANKS ->
     if
     :: IS_IN(i, c) && (arrived[AT(i, c)] != granted[c] + 1 || arrived_in[AT(i, c)] != epoch[c]) -> ok = 0
     :: else
     fi;
     i++
  :: else -> break
  od;
  if
  :: ok && pausing[c] == 0 -> granted[c]++
  :: else
  fi;
  ok = 0; i = 0
}

/* Epochs come round: the older one is farther behind what D's was after the look at the word. */
#define BEHIND(from, now) ((now - from) & 255)

inline raise(c, to, now) {
  if
#ifdef SET
  :: epoch[c] = to
#else
  :: BEHIND(epoch[c], now) > BEHIND(to, now) -> epoch[c] = to
  :: else
#endif
  fi
}

inline move_on(c) {
  if
  :: epoch[c] == known -> epoch[c]++
  :: else
  fi
}

inline tell() {
  if
  :: !told[r] ->
#ifndef NO_TELL
     epoch[D]++;
#endif
     told[r] = 1
  :: else
  fi
}

inline skip_others() {
  do
  :: !IS_IN(r, OF(item[r])) -> item[r]++
  :: else -> break
  od
}

proctype rank(byte r) {
  byte number[COMMS], known, began, batch, c, i, seen;
  bit asked, ok;
  atomic { skip_others() };
  do
  :: batch == BATCHES -> break
  :: else ->
     /* A call is made by the thread; later it comes to its turn. */
     atomic {
       c = OF(item[r]);
       if
       :: !begun[r] ->
          if
          :: begun[r] = 1; told[r] = 0; began = epoch[D]
          :: item[r] == 0
          fi
       :: else
       fi
     };
turn:
     atomic {
#ifndef CONTROL
       gate[r] == IS_OPEN || dead;
#endif
       if
       :: dead -> goto over
       :: lost[r] && item[r] > 0 && !dead -> goto gone
       :: else
       fi;
#ifdef CONTROL
     };
     atomic {
#endif
       inside[r] = 1;
       if
       :: asked -> pausing[c]--; try_to_grant(c); goto waits
       :: else
       fi;
#ifdef NO_BEGIN
       known = (item[r] == 0 -> epoch[c] : epoch[D]);
#else
       known = (item[r] == 0 -> epoch[c] : began);
#endif
#ifdef OLD_LOOK
       seen = epoch[D]
     };
     atomic {
#else
       seen = epoch[D];
#endif
#ifndef NO_RAISE
       if
#ifdef PRESENT
       :: item[r] > 0 && c != D -> raise(c, seen, seen)
#else
       :: item[r] > 0 && c != D -> raise(c, known, seen)
#endif
       :: else
       fi;
#endif
       seen = 0
     };
arrives:
     atomic {
       number[c]++;
       arrived[AT(r, c)] = number[c]; arrived_in[AT(r, c)] = known;
       asked = 1;
       try_to_grant(c)
     };
waits:
     do
     :: atomic { granted[c] >= number[c] -> goto make }
     :: atomic { granted[c] < number[c] && epoch[c] != known && item[r] == 0 ->
          known = epoch[c];
#ifndef NO_AGAIN
          number[c]--; asked = 0;
          goto arrives
#endif
        }
     :: atomic { granted[c] < number[c] && epoch[c] != known && item[r] > 0 -> goto dropped }
#ifndef NO_LOOK
     :: atomic { granted[c] < number[c] && epoch[c] == known && item[r] > 0 && epoch[D] != known ->
#ifdef NO_STOP
          goto dropped
#else
          seen = epoch[D]
#endif
        };
        atomic {
          raise(c, seen, epoch[D]);
          seen = 0;
#ifdef NO_RELOOK
          goto dropped
#endif
        }
#endif
#ifndef CONTROL
     :: atomic { (gate[r] == CLOSING || lost[r] && item[r] > 0) && !dead ->
          pausing[c]++;
#ifndef NO_DEBT
          if
          :: granted[c] >= number[c] -> pausing[c]--; goto make
          :: else
          fi;
#endif
          inside[r] = 0
        };
        goto turn
#endif
     :: atomic { dead && granted[c] < number[c] -> goto over }
     od;
make:
     atomic {
       assert(number[c] == granted[c]);
       if
       :: made[c] == 0 ->
          work[c] = batch * CALLS + item[r] + 1;
          work_of[c] = (item[r] == 0 -> 0 : began)
       :: else ->
          assert(work[c] == batch * CALLS + item[r] + 1);
          assert(item[r] == 0 || work_of[c] == began)
       fi;
       assert(dead || gate[r] != CLOSED);
       made[c] = made[c] | (1 << r);
#ifdef CONTROL
       assert(dead || item[r] == 0 || !lost[r]);  /* it would be made with memory that has gone */
       launched[AT(r, c)] = number[c];
#endif
       if
       :: made[c] == MEMBERS(c) -> made[c] = 0; work[c] = 0; work_of[c] = 0
       :: else
       fi;
       if
       :: item[r] < END -> item[r]++
       :: else -> assert(dead || !lost[r]); batch++; item[r] = 0; begun[r] = 0; began = 0
       fi;
       skip_others();
       asked = 0; known = 0; c = 0;
       inside[r] = 0
     };
     goto next;
dropped:  /* by the others */
     atomic { number[c]--; asked = 0; inside[r] = 0 };
     atomic {
       if
       :: !lost[r] -> lost[r] = 1; told[r] = 1
       :: else
       fi
     };
gone:
     if
     :: asked ->  /* it has been taken back, and will not be asked again */
#ifdef BACK_FIRST
        atomic { pausing[c]--; move_on(c); try_to_grant(c) };
        atomic { move_on(D); number[c]--; asked = 0 }
#else
        atomic {
          if
          :: c == D -> pausing[c]--; move_on(c); try_to_grant(c)
          :: else ->
#ifndef NO_MOVE
             move_on(D);
#endif
             seen = epoch[D]
          fi
        };
        atomic {
          if
          :: c != D ->
             pausing[c]--;
#ifndef NO_BACK
             raise(c, seen, epoch[D]);
#endif
             try_to_grant(c)
          :: else
          fi;
          seen = 0; number[c]--; asked = 0
        }
#endif
     :: else
     fi;
     atomic {
       !short_of[r];
       tell();
       begun[r] = 0; lost[r] = 0; item[r] = 1;
       skip_others();
       known = 0; began = 0; c = 0
     };
next:
     skip
  od;
over:
  skip
}

#define IS_BUSY(r) (RUNS(r, 0) || RUNS(r, 1) || RUNS(r, D) || (D > 2 && RUNS(r, 2 % COMMS)) || (D > 3 && RUNS(r, 3 % COMMS)))

/* Takes memory of a micro-batch, if there is one; or it is only a pause. */
proctype taker(byte r) {
  byte n;
  bit again;
#ifdef CONTROL
  byte c, i, cut[COMMS];
  bit ok;
#endif
  do
  :: n == TIMES || dead -> break
  :: else ->
     n++;
     gate[r] = CLOSING;
#ifdef CONTROL
     do
     :: atomic { c < COMMS ->
          if
          :: IS_IN(r, c) -> pausing[c]++; cut[c] = granted[c]
          :: else
          fi;
          c++
        }
     :: atomic { c == COMMS -> c = 0; break }
     od;
     do
     :: atomic { c < COMMS && (dead || launched[AT(r, c)] >= cut[c]) -> cut[c] = 0; c++ }
     :: atomic { c == COMMS -> c = 0; break }
     od;
     gate[r] = CLOSED;
#else
     atomic { !inside[r] || dead; gate[r] = CLOSED };
#endif
     atomic {
       dead || !IS_BUSY(r);
       if
       :: again = begun[r] && !lost[r]; lost[r] = lost[r] || again
       :: begun[r] && !lost[r]
       fi
     };
     if
     :: again -> atomic { again = 0; tell() }
#if defined(CONTROL) && !defined(NO_FOLLOW)
        do
        :: atomic { c < D ->
             if
             :: IS_IN(r, c) -> raise(c, epoch[D], epoch[D])
             :: else
             fi;
             c++
           }
        :: atomic { c == D -> c = 0; break }
        od
#endif
     :: else
     fi;
     gate[r] = IS_OPEN;
#ifdef CONTROL
     do
     :: atomic { c < COMMS ->
          if
          :: IS_IN(r, c) -> pausing[c]--; try_to_grant(c)
          :: else
          fi;
          c++
        }
     :: atomic { c == COMMS -> c = 0; break }
     od
#endif
  od
}

/* The thread of a rank finds no memory for what comes later in its micro-batch; or its training code fails, of which
 * the others hear when the micro-batch is about to run again. */
proctype shortage(byte r) {
  if
  :: atomic { begun[r] && !lost[r] && item[r] < END && !dead -> lost[r] = 1; short_of[r] = 1 };
     atomic { tell(); short_of[r] = 0 }
  :: atomic { begun[r] && !lost[r] && item[r] < END && !dead -> lost[r] = 1 }
  :: true
  fi
}

#ifdef DEATH
proctype killer() {
  dead = 1
}
#endif

init {
  byte i;
  atomic {
    do
    :: i < RANKS ->
       run rank(i);
       if
       :: i < TAKEN -> run taker(i)
       :: else
       fi;
       if
       :: i < SHORT -> run shortage(i)
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0;
#ifdef DEATH
    run killer()
#endif
  }
}
